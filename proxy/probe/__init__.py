"""Finding out what a deployment supports, by asking it, and writing that into the configuration."""
