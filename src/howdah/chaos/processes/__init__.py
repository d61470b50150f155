"""The processes of a chaos run: workers, producers, and the supervisor that starts and replaces them."""
