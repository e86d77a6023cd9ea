package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/cavaliergopher/cpio"

	"github.com/landfall-lb/landfall/release/image"
)

const kernelPackage = "linux-image-amd64"

// packages are what the virtual machine is made of, beside its kernel and the programs under test.
var packages = []string{
	"base-files", "busybox-static", "conntrack", "iproute2", "ipset", "iptables", "ipvsadm", "kmod",
	"nftables", "procps", "bird2",
}

// links are what the installation of these packages would make.
var links = map[string]string{
	"usr/bin/sh":        "busybox",
	"usr/sbin/iptables": "iptables-nft", "usr/sbin/iptables-save": "iptables-nft-save",
	"usr/sbin/iptables-restore": "iptables-nft-restore",
	"usr/sbin/ip6tables":        "ip6tables-nft", "usr/sbin/ip6tables-save": "ip6tables-nft-save",
	"usr/sbin/ip6tables-restore": "ip6tables-nft-restore",
}

// modules are the folders below lib/modules/RELEASE/kernel whose modules tests may need; a name that
// ends in a slash is a folder with all that is in it.
var modules = []string{
	"arch/x86/crypto/", "crypto/", "lib/", "drivers/net", "drivers/net/bonding/", "drivers/net/vxlan/",
	"net/802/", "net/8021q/", "net/bridge/", "net/core/", "net/ipv4/", "net/ipv6/", "net/key/", "net/llc/",
	"net/netfilter/", "net/sched/", "net/sctp/", "net/tls/", "net/xfrm/",
}

// left are the folders whose files nothing in the virtual machine reads.
var left = []string{"boot/", "usr/share/", "usr/lib/python3/", "usr/lib/x86_64-linux-gnu/perl",
	"usr/lib/x86_64-linux-gnu/gconv/", "usr/lib/locale/", "etc/kernel/", "usr/include/"}

const (
	planFile   = "etc/landfall-vm.json"
	modulesDir = "usr/lib/modules/"
)

// mergedFolders are links to those of the same name below usr, where newer packages have their files;
// older ones have some of them here.
var mergedFolders = []string{"bin", "lib", "lib64", "sbin"}

// merged returns where a package's file is found.
func merged(file string) string {
	root, _, below := strings.Cut(file, "/")
	switch {
	case !slices.Contains(mergedFolders, root):
		return file
	case !below:
		return "" // the link itself
	}
	return "usr/" + file
}

// system chooses from the files of packages those that the virtual machine gets. It returns the
// kernel apart, and the kernel's release.
func system(files []image.File) (chosen []image.File, kernel []byte, release string, err error) {
	for _, f := range files {
		if name, ok := releaseOf(f.Path); ok {
			if release != "" {
				return nil, nil, "", fmt.Errorf("there are two kernels: %s and %s", release, name)
			}
			kernel, release = f.Content, name
			continue
		}
		if f.Path = merged(f.Path); wanted(f.Path) {
			chosen = append(chosen, f)
		}
	}
	if release == "" {
		return nil, nil, "", errors.New("the packages have no kernel")
	}
	for _, dir := range mergedFolders {
		chosen = append(chosen, image.File{Path: dir, Mode: fs.ModeSymlink | 0o777, Link: "usr/" + dir})
	}
	for at, to := range links {
		if !slices.ContainsFunc(chosen, func(f image.File) bool { return f.Path == at }) {
			chosen = append(chosen, image.File{Path: at, Mode: fs.ModeSymlink | 0o777, Link: to})
		}
	}
	return chosen, kernel, release, nil
}

// releaseOf returns the release of a kernel's file, which is beside its modules in packages since Linux 7.
func releaseOf(file string) (release string, ok bool) {
	if release, ok = strings.CutPrefix(file, "boot/vmlinuz-"); ok {
		return release, true
	}
	if below, is := strings.CutPrefix(merged(file), modulesDir); is {
		return strings.CutSuffix(below, "/vmlinuz")
	}
	return "", false
}

func wanted(file string) bool {
	if file == "" {
		return false
	}
	if below, ok := strings.CutPrefix(file, modulesDir); ok {
		_, module, ok := strings.Cut(below, "/kernel/")
		return !ok || slices.ContainsFunc(modules, func(dir string) bool {
			return strings.HasSuffix(dir, "/") && strings.HasPrefix(module, dir) || path.Dir(module) == dir
		})
	}
	return !slices.ContainsFunc(left, func(dir string) bool { return strings.HasPrefix(file, dir) })
}

// writeInitramfs writes the files as an archive that Linux unpacks when it starts, with the program
// init to start there and the plan that it follows.
func writeInitramfs(w io.Writer, files []image.File, init []byte, plan []Program) error {
	text, err := json.Marshal(plan)
	if err != nil {
		return err
	}
	all, err := image.WithFolders(append(slices.Clone(files), image.File{Path: "init", Mode: 0o755, Content: init},
		image.File{Path: planFile, Mode: 0o644, Content: text}))
	if err != nil {
		return err
	}
	archive := cpio.NewWriter(w)
	for _, f := range all {
		if err := writeFile(archive, f); err != nil {
			return fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	return archive.Close()
}

func writeFile(archive *cpio.Writer, f image.File) error {
	header, content := &cpio.Header{Name: f.Path, Links: 1, Mode: cpio.FileMode(f.Mode.Perm())}, f.Content
	switch {
	case f.Mode.IsDir():
		header.Mode |= cpio.TypeDir
	case f.Mode&fs.ModeSymlink != 0:
		header.Mode |= cpio.TypeSymlink
		content = []byte(f.Link)
	case f.Mode.IsRegular():
		header.Mode |= cpio.TypeReg
	default:
		return fmt.Errorf("its type is %s: want a file, a folder or a link", f.Mode.Type())
	}
	header.Size = int64(len(content))
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	_, err := archive.Write(content)
	return err
}
