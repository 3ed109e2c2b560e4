"""Where stepahead runs: manifests of a Ray cluster on Kubernetes, and whether a model fits on its GPUs."""
