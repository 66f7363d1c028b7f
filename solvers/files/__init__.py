"""Problems as text and files."""
