"""Sharded model, optimizer and loader cursors in one commit. Knows nothing of controller or agent."""
