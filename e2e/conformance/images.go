package conformance

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/e2e/cluster"
	"github.com/landfall-lb/landfall/release/image"
)

// Names of the images that are made. The suite asks for others, which are other names of these.
const (
	agnhostImage    = "landfall.test/agnhost:cluster"
	regressionImage = "landfall.test/regression-issue-74839:cluster"
)

// standIns says which image stands for those of the suite, by the last part of their names without
// a tag. Of those that agnhost stands for, the specs need a shell, dig or a process that stays.
var standIns = map[string]string{
	"agnhost": agnhostImage, "busybox": agnhostImage, "jessie-dnsutils": agnhostImage, "nginx": agnhostImage,
	"distroless-iptables": agnhostImage, "pause": cluster.PauseImage, "regression-issue-74839": regressionImage,
}

// aliases returns which image of ours each image of a list stands for.
func aliases(list string) map[string]string {
	names := map[string]string{}
	for name := range strings.FieldsSeq(list) {
		base, _, _ := strings.Cut(path.Base(name), ":")
		if image, ok := standIns[base]; ok {
			names[name] = image
		}
	}
	return names
}

// listImages asks the suite for the images that it uses.
func listImages(ctx context.Context, suite string) (string, error) {
	out, err := exec.CommandContext(ctx, suite, "--list-images").Output()
	if err != nil {
		return "", fmt.Errorf("images of the suite: %w", err)
	}
	return string(out), nil
}

// debianPackages are what the specs call in a container of agnhost.
var debianPackages = []string{
	"bash", "bind9-dnsutils", "busybox", "conntrack", "curl", "iproute2", "libc-bin", "netcat-openbsd", "wget",
}

// applets are the programs that busybox is, where no package brings them.
var applets = []string{
	"awk", "cat", "chmod", "cp", "cut", "date", "echo", "env", "expr", "false", "find", "grep", "head", "hostname", "id",
	"ls", "mkdir", "mktemp", "mv", "nslookup", "ping", "printf", "ps", "rm", "sed", "seq", "sh", "sleep", "sort", "stat",
	"tail", "tee", "test", "timeout", "touch", "tr", "true", "uniq", "wc", "which", "xargs",
}

// root returns the files that containers of agnhost find beside it.
func root(packages []image.File) []image.File {
	link := func(path, to string) image.File {
		return image.File{Path: path, Mode: fs.ModeSymlink | 0o777, Link: to}
	}
	files := append(slices.Clone(packages), link("bin/nc", "nc.openbsd"))
	for _, applet := range applets {
		has := func(f image.File) bool {
			dir, name := path.Split(f.Path)
			return name == applet && slices.Contains([]string{"bin/", "sbin/", "usr/bin/", "usr/sbin/"}, dir)
		}
		if !slices.ContainsFunc(files, has) {
			files = append(files, link("bin/"+applet, "busybox"))
		}
	}
	return files
}

// makeImages writes the archives of the images that the suite needs beside the cluster's.
func makeImages(ctx context.Context, tool func(name string) (string, error), progress func(string)) ([]string, error) {
	kept, err := cache.Folder()
	if err != nil {
		return nil, err
	}
	progress("image " + agnhostImage)
	packages, err := image.Root(ctx, runtime.GOARCH, filepath.Join(kept, "agnhost-"+runtime.GOARCH), "",
		debianPackages...)
	if err != nil {
		return nil, err
	}
	programs := func(names ...string) ([]image.File, error) {
		var files []image.File
		for _, name := range names {
			path, err := tool(name)
			if err != nil {
				return nil, err
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			files = append(files, image.File{Path: name, Mode: 0o755, Content: content})
		}
		return files, nil
	}
	agnhost, err := programs("agnhost", "coredns")
	if err != nil {
		return nil, err
	}
	agnhost = append(agnhost, image.File{Path: "uploads", Mode: fs.ModeDir | 0o777},
		// As the wget of upstream's image does: specs count attempts.
		image.File{Path: "etc/wgetrc", Mode: 0o644, Content: []byte("tries = 1\n")},
		image.File{Path: "agnhost-2", Mode: fs.ModeSymlink | 0o777, Link: "agnhost"})
	regression, err := programs("regression-issue-74839")
	if err != nil {
		return nil, err
	}
	var archives []string
	for _, i := range []struct {
		name, file string
		image      image.Image
	}{
		{agnhostImage, "agnhost.tar", image.Image{
			Layers: [][]image.File{root(packages), agnhost},
			Config: image.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"},
				Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
		}},
		{regressionImage, "regression-issue-74839.tar", image.Image{
			Layers: [][]image.File{regression}, Config: image.Config{Entrypoint: []string{"/regression-issue-74839"}},
		}},
	} {
		i.image.Arch, i.image.Fast = runtime.GOARCH, true
		archives = append(archives, filepath.Join(kept, "images", i.file))
		if _, err := image.Write(archives[len(archives)-1], i.name, i.image); err != nil {
			return nil, err
		}
	}
	return archives, nil
}
