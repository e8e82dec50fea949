"""Messages between processes of one host through memory that both map."""
