"""Kustomize manifests, and a check of the cluster to run before applying them."""
