"""The multisource loader. Knows nothing of controller or agent."""
