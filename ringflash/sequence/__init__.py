"""The sequence in global coordinates: tokens of each rank (`layout`), visible pairs (`mask`), documents, padding and labels."""
