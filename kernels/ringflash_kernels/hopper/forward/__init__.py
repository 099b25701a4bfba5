"""The forward kernel, its tile shapes and its launch."""
