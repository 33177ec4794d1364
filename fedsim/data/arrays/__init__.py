"""Arrays of users: archives of numpy, and the layout of images."""
