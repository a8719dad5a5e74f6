"""What is read of the GPUs: sample streams, the loop that reads them on time, checks of health and co-tenants."""
