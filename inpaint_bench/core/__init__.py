"""What all layers share: schemas, configuration, records, files, errors."""
