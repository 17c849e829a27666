"""What speaks to the servers that answer: connections, their errors, their streams."""
