"""The engine behind Ray Serve: Routers speak OpenAI's HTTP API, EngineReplicas run one engine each."""
