"""Deployment: launcher, demo models, images, manifests, dashboards."""
