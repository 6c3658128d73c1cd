"""The engine without ranks, values and memory: what a step sends and holds, from the engine that will do it."""
