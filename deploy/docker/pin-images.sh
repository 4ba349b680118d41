#!/bin/sh
# Puts the digest behind the tag of every image that unpinned.txt lists, wherever deploy/ names it.
set -eu
cd "$(dirname "$0")/.."
list=docker/unpinned.txt
for image in $(grep '^[^#].*:' "$list"); do
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    case $digest in sha256:*) ;; *) echo "$image: no digest: $digest" >&2; exit 1 ;; esac
    for file in compose.yaml docker/*.Dockerfile envoy/deployment.yaml; do
        sed -E "s#((ARG [A-Z]+_IMAGE=|image: )$image)( |\$)#\1@$digest\3#" "$file" > "$file.new"
        mv "$file.new" "$file"
    done
    grep -vxF "$image" "$list" > "$list.new"
    mv "$list.new" "$list"
done
