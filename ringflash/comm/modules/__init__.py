"""Agreement about modules: buffers that layers change, averages of gradients, FSDP2 units that ranks skip."""
