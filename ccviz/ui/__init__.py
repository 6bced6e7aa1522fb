"""What the app's pages share. Streamlit is imported here and in the pages, and nowhere else."""
