package vm

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"

	"github.com/landfall-lb/landfall/release/image"
)

// compressed is how the names of modules end in Debian 13 and later. depmod there does not depend on the library that
// unpacks them, and an emulated processor takes long to.
const compressed = ".ko.xz"

// unpackModules replaces compressed modules by what they unpack to.
func unpackModules(ctx context.Context, files []image.File) ([]image.File, error) {
	var unpacked []image.File
	for _, f := range files {
		if strings.HasPrefix(f.Path, modulesDir) && strings.HasSuffix(f.Path, compressed) {
			cmd := exec.CommandContext(ctx, "xz", "--decompress", "--stdout")
			var stderr strings.Builder
			cmd.Stdin, cmd.Stderr = bytes.NewReader(f.Content), &stderr
			content, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("unpack %s: xz (package xz-utils): %w: %s", f.Path, err, stderr.String())
			}
			f.Path, f.Content = strings.TrimSuffix(f.Path, ".xz"), content
		}
		unpacked = append(unpacked, f)
	}
	return unpacked, nil
}
