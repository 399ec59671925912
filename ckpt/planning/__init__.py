"""Who writes and who reads which bytes, and how often. PURE."""
