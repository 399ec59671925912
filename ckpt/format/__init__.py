"""What is stored, to bytes and back, and what is checked of it before it is believed."""
