"""Python imports this in every process whose PYTHONPATH has this folder: the processes that a victim starts are watched too."""

import kill_points

kill_points.from_environment()
