"""Problems as files."""
