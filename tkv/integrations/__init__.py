"""tkv within other engines. Nothing here is imported by tkv itself; each module needs the project that it is named after."""
