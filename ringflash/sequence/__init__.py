"""The sequence as all ranks see it: which tokens a rank holds (`layout`), which pairs attend (`mask`), and padding."""
