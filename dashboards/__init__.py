"""What stepahead shows of itself: Grafana dashboards built from the engine's metrics. Still empty."""
