"""What a job looks like: one frozen `JobView` of what etcd and the object store hold, told in words and drawn.

`observing` decides nothing and asks nobody: `surefoot status`, `surefoot run` and the demo feed it what they listed (through
`controller.reader`), print the very snapshot with ``--json``, and draw it with `picture`, the only module here with rich.
"""
