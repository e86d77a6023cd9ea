package image

// Artifact is a file that registries keep as they keep an image, such as a packaged chart.
type Artifact struct {
	// ConfigType and Type are the media types of Config and Content.
	ConfigType, Type string
	Config           any // is written as JSON
	Content          []byte
	Annotations      map[string]string
}

// WriteArtifact writes an archive in the OCI image layout that holds an artifact of that name. It
// returns the digest of the manifest.
func WriteArtifact(to, name string, a Artifact) (digest string, err error) {
	contents := blobs{}
	m := manifest{SchemaVersion: 2, MediaType: typeManifest, Annotations: a.Annotations,
		Layers: []descriptor{contents.add(a.Type, a.Content)}}
	if m.Config, err = contents.addJSON(a.ConfigType, a.Config); err != nil {
		return "", err
	}
	top, err := contents.addJSON(typeManifest, m)
	if err != nil {
		return "", err
	}
	return top.Digest, contents.saveLayout(to, name, top, nil)
}
