"""Manifests for kustomize, and what looks at a cluster before they are applied."""
