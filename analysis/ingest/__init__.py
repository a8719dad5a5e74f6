"""Read run directories: manifests, windows and Parquet parts."""
