"""Drop-ins: other libraries' names and signatures for this step, on acceptlib's public interface alone."""
