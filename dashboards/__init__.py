"""What stepahead shows of itself: Grafana dashboards and Prometheus alerts, from the engine's metrics."""
