"""Device mesh and seeding, shared by the Lightning and DeepSpeed strategies."""
