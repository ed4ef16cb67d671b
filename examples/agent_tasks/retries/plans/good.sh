cat > attempt.tmp <<'EOF'
    for left in reversed(range(attempts)):
        try:
            connection = connect()
            try:
                return work(connection)
            finally:
                connection.close()
        except TemporaryError:
            if not left:
                raise
EOF
sed -i '/    for _ in range(attempts):/,$d' retries.py
cat attempt.tmp >> retries.py
rm attempt.tmp
