"""Parts of the GPU check that need more of the repository than the package itself."""
