"""Worlds: the ranks of one process group, how they are started and watched, and what runs in them."""
