"""Where stepahead runs: the manifests and checks for a Ray cluster on Kubernetes. Still empty."""
