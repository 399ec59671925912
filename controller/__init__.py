"""The brain of a job: one leading controller, any number of standbys."""
