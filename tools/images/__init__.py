"""Builds the images of deploy/docker/Dockerfile, and what a release has beside them. docs/release.md describes it."""
