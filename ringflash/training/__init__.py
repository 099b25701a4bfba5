"""Parts shared by the Lightning and DeepSpeed strategies: the device mesh and seeding."""
