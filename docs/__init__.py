"""How the documentation is made; its text is in pages/."""
