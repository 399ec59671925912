"""`tables.JobSpec`: what a job file says, checked without touching the world. PURE, but for the one file that is read.

House rules. Keys are exactly those of the TOML file, tables are frozen dataclasses, everything that can be left out has a
default here and nowhere else. `reading.parse_spec` finds *all* problems of a file before it refuses it, each with its
place, its reason and, for a name that does not exist, the nearest one that does. Nothing is imported, connected or looked
up: a laptop can check the spec of a thousand GPUs. What the file may already say but Surefoot cannot do yet is refused in
so many words ("comes later"), never ignored.
"""
