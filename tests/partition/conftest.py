from hypothesis import settings

# No deadlines: a slow machine is not a failure.
settings.register_profile("shardlab", deadline=None)
settings.load_profile("shardlab")
