"""The sequence: tokens of each rank (`layout`), visible pairs (`mask`), documents, labels and padding."""
