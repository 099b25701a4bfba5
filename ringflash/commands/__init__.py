"""The command line `ringflash`: `doctor`, `plan`, `verify` and `bench`. No other package imports this one."""
