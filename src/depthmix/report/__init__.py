"""Pages for people, from files alone. Nothing here knows torch."""
