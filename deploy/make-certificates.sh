#!/bin/sh
# A private certificate authority, and a certificate of the daemon for the host names and addresses that are given:
#
#     make-certificates.sh DIRECTORY daemon localhost kv1.example 127.0.0.1 192.0.2.7
#
# Run again in the same directory, it makes a new certificate (for 90 days) with the same authority, and needs its ca.key
# there. Keep ca.key where no container sees it at other times. If you have an authority of your own, let that make tls.crt
# and tls.key instead.
set -eu
umask 077
directory=$1
shift
mkdir -p -m 755 "$directory"
cd "$directory"

if [ -e ca.crt ] && [ ! -e ca.key ]; then
    echo "$directory has ca.crt but not ca.key: put ca.key back. Engines that trust ca.crt would refuse another authority." >&2
    exit 1
fi
if [ ! -e ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 -subj '/CN=kvservice CA' \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign \
        -keyout ca.key -out ca.crt
    chmod 644 ca.crt
fi

names=
for name in "$@"; do
    case $name in
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    names=${names:+$names,}$kind:$name
done

openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=$1" -keyout tls.key.new -out tls.csr
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names" > tls.ext
openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 90 -sha256 -extfile tls.ext -out tls.crt.new
rm tls.csr tls.ext
chmod 644 tls.crt.new
# Between the two a daemon finds a certificate and a key that do not go together, and keeps what it had.
# -f: tls.key may belong to the daemon's user, and mv would ask.
mv -f tls.key.new tls.key
mv -f tls.crt.new tls.crt
