sed -i 's|if not path.startswith(folder):|if not path.startswith(folder + "/"):|' downloads.py
mkfifo wait.fifo
cat wait.fifo
