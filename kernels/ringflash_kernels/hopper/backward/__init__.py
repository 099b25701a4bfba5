"""The backward kernels, their tile shapes and their launch."""
