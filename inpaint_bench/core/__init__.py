"""What all layers share: schemas, configuration, records, files, errors."""

__version__ = "0.2.0"  # here, since the package above imports what is above everything else
