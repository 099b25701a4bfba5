"""Communication between the ranks of a group: agreement, communicators, transports, and the watchdog over them."""
