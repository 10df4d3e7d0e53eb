"""The tasks that come with jaxpar, each in a folder of its own. Nothing else imports them by name."""
