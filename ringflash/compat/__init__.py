"""Functions of other packages, with their arguments and layouts, computed by ringflash."""
